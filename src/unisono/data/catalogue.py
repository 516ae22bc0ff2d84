"""How many samples there are to train on in each data set, known without loading it."""

SAMPLES = {"digits": 1437}
