"""One parameter by itself: its attributes, its values, its shards, and the contexts that gather it."""
