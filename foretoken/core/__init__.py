"""Values that all other packages share: token trees, requests, results, errors; depends on torch only."""
