"""Coverage-guided fuzzing of everything that reads what other people, or models, wrote: `make fuzz`."""
