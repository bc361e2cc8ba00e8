"""Write and read models alone, as Hugging Face's libraries lay them out."""
