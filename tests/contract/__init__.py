"""One table of examples for every operator, and the tests that all operators and backends share."""
