"""``python -m dspark_train``."""

from dspark_train.cli.main import main

if __name__ == "__main__":
    main()
