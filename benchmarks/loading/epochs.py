"""Starts feeding.py on a rank. A worker that is spawned imports this file again, and must not start MPI.

Started on the ranks by run.py:  epochs.py OUTPUT PACK FOLDER
"""

import sys

if __name__ == "__main__":
    from feeding import main

    main(*sys.argv[1:])
