"""The measuring side: clock, ceilings, results, tables. It knows no optimization."""
