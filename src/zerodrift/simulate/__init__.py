"""What a step would take on machines that are described in a file: nothing is run there.

A plan says what is computed and sent in which order, a trace of the model how much is computed, a cluster how
fast that is. `play` puts them on streams.
"""
