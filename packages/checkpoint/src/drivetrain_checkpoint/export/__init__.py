"""Write and read models alone, in the layout of Hugging Face's libraries."""
