"""From the bytes of a picture to what a network is given."""
