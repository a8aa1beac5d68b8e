"""What is likely to come next: one file a method, found by its file name. Drafters know neither each other nor the engine."""
