"""Context parallelism and long contexts. Not built yet: this package is empty."""
