"""Block patterns that say which keys a query may skip."""
