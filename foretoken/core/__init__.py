"""Values that every other part speaks in: token trees, requests, records, results, errors. Knows torch only."""
