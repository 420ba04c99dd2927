"""Pretraining of the embedded benchmark's tiny models: tokenizer, architecture, wordings, stages, model cards."""
