"""Plan which rank writes which bytes, and which bytes a rank reads."""
