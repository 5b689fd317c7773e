"""The measurements: one file an optimization, its name with _speed."""
