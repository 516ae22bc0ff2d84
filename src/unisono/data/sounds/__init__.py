"""From the bytes of a recording to what a network is given."""
