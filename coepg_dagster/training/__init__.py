"""SFT of π_k and ϕ_k and GRPO of π'_k, on TRL's trainers."""
