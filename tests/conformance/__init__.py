"""Other people's test suites and programs, each run plain and under xsmc and compared. `scripts/conformance` starts it."""
