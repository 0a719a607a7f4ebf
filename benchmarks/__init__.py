"""One runnable module per headline figure: `python -m benchmarks.NAME --json`. A benchmark reports; it never judges."""
