"""The example project's pages."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path, re_path

from . import views

urlpatterns = [
    path("", views.index, name="index"),
    path("ask/", views.ask, name="ask"),
    path("ask/<slug:name>/", views.answer, name="answer"),
    path("log/", views.log, name="log"),
    path("log/<slug:name>/", views.run, name="run"),
    re_path(r"^(?P<kind>ask|log)/(?P<name>[-\w]+)/stop/$", views.stop, name="stop"),
    path("admin/", admin.site.urls),
    path("favicon.ico", views.favicon),  # asked for by browsers on the admin's pages
]
