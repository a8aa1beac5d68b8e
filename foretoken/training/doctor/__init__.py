"""Why a head would not draft, found before anybody measures a disappointing speed."""
