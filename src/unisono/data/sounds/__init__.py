"""Conversion of the bytes of audio recordings to network inputs."""
