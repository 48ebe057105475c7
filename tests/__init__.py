"""The tests, laid out as the packages; ``checks.py`` has the accuracy rule."""
