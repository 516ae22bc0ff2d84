"""A cluster of network namespaces with shaped links, on one Linux machine."""
