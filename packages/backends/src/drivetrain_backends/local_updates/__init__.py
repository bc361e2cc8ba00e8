"""Training that seldom talks: replicas step on their own gradients, and exchange weights every few steps."""
