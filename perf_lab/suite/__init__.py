"""The properties and the benchmarks for those who have the wheel and not the repository.

In the wheel, `tests` and `bench` of the repository are packages of this one (by .ci/hatch_build.py):

    pytest --pyargs perf_lab.suite --impl softmax=mypkg.kernels:softmax -k mypkg

runs every property and every benchmark of the op softmax on the function `softmax` of mypkg/kernels.py. What
reads files of the repository itself is skipped, with that reason.
"""
