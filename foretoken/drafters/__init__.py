"""What is likely to come next: one file a method, found by its name. Drafters know no engine and not each other."""
