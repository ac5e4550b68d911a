"""Benchmarks: prompts, an interleaved measuring loop, peers on the same weights, and the report."""
