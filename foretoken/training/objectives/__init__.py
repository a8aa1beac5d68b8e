"""What heads are trained towards, one file a method."""
