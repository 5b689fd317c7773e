"""Public fault reports, and the mutants that repeat them here.

A row's key is a room's letters and a number; its report is repository and issue. What a mutant cannot repeat
stands in NOT_PLANTABLE with the reason.
"""

PLANTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "KV1": (
        "huggingface/transformers#30042",
        ("speculative-PositionAdvancesByOne", "decoder-PositionsCountCalls"),
    ),
    "KV2": ("ml-explore/mlx-lm#1868", ("kv_cache-NegativeTruncateGrows", "kv_cache-NegativeRollbackGrows")),
    "KV5": (
        "huggingface/transformers#39408",
        (
            "attention-window_of_one_more",
            "paged_attention-window_off_by_one",
            "decoder-WindowOfOneMoreWithCache",
        ),
    ),
    "KV6": ("unslothai/unsloth#3803", ("decoder-OnePositionVector", "generate-one_position_vector")),
    "PG1": ("openvinotoolkit/openvino.genai#3722", ("kv_pool-TrustsTheHash", "kv_pool-ComparesOneBlock")),
    "PG2": ("vllm-project/vllm#12603", ("kv_pool-ForgetsTheParent",)),
    "PG3": ("GeeeekExplorer/nano-vllm#163", ("kv_pool-StaleHash", "kv_pool-StaleAfterOverwriting")),
    "PG4": ("GeeeekExplorer/nano-vllm#114", ("kv_pool-NothingLeftToCompute",)),
    "PG7": ("xLLM-AI/xllm#1984", ("kv_pool-NoCopyOnWrite", "kv_pool-CopiesOneLayer")),
    "PG8": ("sgl-project/sglang#35270", ("kv_pool-FreeAndIdle", "kv_pool-LeaksOnTruncate")),
    "PG9": ("GeeeekExplorer/nano-vllm#233", ("kv_pool-FindsLessThanItTakes", "serving-CountsThePromptAgain")),
    "AT1": ("pytorch/pytorch#103749", ("attention-nan_for_nothing", "attention-mean_for_nothing")),
    "AT3": ("pytorch/pytorch#108108", ("attention-aligned_top_left", "paged_attention-top_left")),
    "AT5": ("onnx/onnx#7274", ("attention-heads_tiled", "paged_attention-tiled_heads")),
    "AT6": ("pytorch/pytorch#112577", ("attention-strides_ignored",)),
    "AT7": ("triton-lang/triton#621", ("attention-head_dim_tail_ignored", "attention-last_tile_dropped")),
    "AT8": ("huggingface/transformers#33317", ("attention-unscaled_overflow",)),
    "AT9": ("fla-org/flash-linear-attention#172", ("attention-grid_cut_off", "attention-offsets_wrap")),
    "QZ1": ("ggml-org/llama.cpp#20460", ("int8-ZeroOverZero", "nf4-ZeroBlockOfOnes")),
    "QZ2": ("ggml-org/llama.cpp#25221", ("int8-ReciprocalOfATinyScale", "int8-HalfScaleUnclamped")),
    "QZ3": (
        "bitsandbytes-foundation/bitsandbytes#1884",
        ("nf4-TailPolluted", "nf4-TailPadded", "nf4-DropsTheOddCode"),
    ),
    "QZ4": (
        "bitsandbytes-foundation/bitsandbytes#1342",
        ("int8-ReadsTheBuffer", "nf4-FlattensTheStorage", "int8-DecodesTheBuffer"),
    ),
    "QZ6": ("bitsandbytes-foundation/bitsandbytes#1946", ("quantized_linear-KeepsOldScales",)),
    "QZ8": ("vllm-project/vllm#52576", ("quantized_linear-OneScaleATile",)),
    "SP1": ("huggingface/transformers#32867", ("speculative-greedy_draft_with_a_soft_law",)),
    "SP3": (
        "huggingface/transformers#47912",
        ("speculative-EosOnlyAtTheEnd", "speculative-EosIsNotCut", "speculative-BudgetOverrun"),
    ),
    "SP4": ("vllm-project/vllm#27077", ("generate-threshold_at_zero", "speculative-coldest_is_a_half")),
    "SP6": (
        "lablup/mlxcel#994",
        ("speculative-DraftRewoundTwoTooMany", "speculative-DraftReadsOneToken"),
    ),
    "SP7": ("vllm-project/vllm#13849", ("speculative-target_cut_to_the_drafts_vocabulary",)),
    "SP8": (
        "ohdearquant/lattice#243",
        ("speculative-FirstTokenUnverified", "speculative-VerifiedAgainstTheNextChoice"),
    ),
    "SP9": (
        "ggml-org/llama.cpp#25618",
        ("speculative-ChoosesFromRoundedLogits", "speculative-HighestIdWins"),
    ),
    "TR2": ("triton-lang/triton#11584", ("rms_norm-kernel_squares_in_bfloat16",)),
    "TR4": ("unslothai/unsloth#10617", ("rms_norm-unit_stride", "add_rms_norm-strides_of_x")),
    "TR5": ("flagos-ai/FlagGems#3716", ("softmax-kernel_sums_its_padding", "softmax-maximum_of_zero")),
    "TR6": ("triton-lang/triton#2858", ("softmax-one_block_only", "softmax-at_least_one_row")),
    "TR7": (
        "linkedin/Liger-Kernel#92",
        (
            "rms_norm-cast_before_weight",
            "rms_norm-promoted",
            "rms_norm-eps_in_half",
            "rms_norm-float16_squares",
        ),
    ),
    "BM1": ("1ytic/warp-rnnt#9", ("timer-never_waits",)),
    "BM3": ("meta-pytorch/tritonbench#527", ("timer-flush_inside",)),
}

NOT_PLANTABLE: dict[str, tuple[str, str]] = {
    "TR1": (
        "triton-lang/triton#6547",
        "no call tries configurations on its own data: `perf-lab tune` does, on inputs that it draws;"
        " test_tuning::test_a_tuned_call_is_right_in_a_fresh_process holds first calls to it on a GPU",
    ),
    "BM4": (
        "ionelmc/pytest-benchmark#268",
        "the fault is in files of results, which test_report::test_any_field_but_name_and_time_may_be_"
        "missing_or_odd writes itself",
    ),
}

ROWS = (
    *("KV1", "KV2", "KV5", "KV6", "PG1", "PG2", "PG3", "PG4", "PG7", "PG8", "PG9"),
    *("AT1", "AT3", "AT5", "AT6", "AT7", "AT8", "AT9", "QZ1", "QZ2", "QZ3", "QZ4", "QZ6", "QZ8"),
    *("SP1", "SP3", "SP4", "SP6", "SP7", "SP8", "SP9", "TR1", "TR2", "TR4", "TR5", "TR6", "TR7"),
    *("BM1", "BM3", "BM4"),
)
