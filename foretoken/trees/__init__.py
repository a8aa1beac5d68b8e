"""Which candidates go into the tree: shapes over candidate tables, and merging of trees."""
