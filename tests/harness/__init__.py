"""Support code of the end-to-end tests: settings, processes, status documents, C programs, two-process checks."""
