"""Which published models a contract covers: their names, their sizes, one configuration each."""
