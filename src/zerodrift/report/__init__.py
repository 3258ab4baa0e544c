"""Report: nouns as terminal text, an HTML page or JSON. The same columns and the same words everywhere."""
