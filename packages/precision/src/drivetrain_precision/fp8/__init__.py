"""Matrix products in 8 bits and below: recipes, which layers they convert, and the proof that they ran."""
