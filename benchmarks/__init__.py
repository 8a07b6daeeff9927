"""What this project costs and what it saves, beside what it replaces: `python -m benchmarks`."""
