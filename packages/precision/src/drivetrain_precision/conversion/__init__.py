"""Changes of linear layers: the choice of layers (pure), the exchange of a layer's class, and a report."""
