"""What a run would take, said before anything runs: memory, time and disk of every stage."""
