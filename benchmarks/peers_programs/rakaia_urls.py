"""The URLs of rakaia's documentation."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("streams/", include("django_rakaia.urls", namespace="django_rakaia"))]
