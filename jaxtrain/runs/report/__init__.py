"""`jaxtrain report`: one HTML file about one or more runs, which needs nothing around it.

runs' folders -> collect.py: what the page shows, as JSON, thinned and without secrets
              -> page.py: the page, with scripts and styles of jaxtrain/assets in it
"""
