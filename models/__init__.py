"""Families: what each Hugging Face class needs so that its captured graph can be rewritten."""
