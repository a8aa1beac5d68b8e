"""The loop: sequences join, are drafted for, verified, committed and leave. Knows no drafter's name and no protocol."""
