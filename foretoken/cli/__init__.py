"""The command line: one file a command. Modules here import torch only inside the functions that run."""
