"""Matrix products in 8 bits and below: recipes, the layers that they convert, and a check that products ran."""
