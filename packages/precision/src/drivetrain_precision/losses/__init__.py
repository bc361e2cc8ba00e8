"""Cross entropy over large vocabularies: logits in half precision, softmax in fp32, a chunk of tokens at a time."""
