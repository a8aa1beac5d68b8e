"""Reports: traces of generations in files, and one HTML page that shows them token by token, readable offline."""
