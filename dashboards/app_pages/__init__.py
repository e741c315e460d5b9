"""The dashboard's pages, one file each; ``app.py`` registers them."""
