"""The backend that is composed of a strategy, and the strategy of one device."""
