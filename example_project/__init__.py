"""A small project that uses django_pgstreams: the demo, and the ground the tests stand on."""
