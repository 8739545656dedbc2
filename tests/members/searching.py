"""Run by `test_admin`, in a process of its own."""

from __future__ import annotations

from django.test import TestCase

from django_pgstreams.models import Stream
from tests.members.models import Member


class Searching(TestCase):
    def test_streams_are_found_by_their_owners_address(self):
        ada = Member.objects.create(address="ada@example.org", is_staff=True)
        Stream.objects.create(key="chat/1", owner=ada)
        Stream.objects.create(key="chat/2")
        self.client.force_login(ada)
        for query, keys in (("ADA@", ["chat/1"]), ("chat", ["chat/2", "chat/1"]), ("bob", [])):
            page = self.client.get("/admin/pgstreams/stream/", {"q": query})
            assert [stream.key for stream in page.context["cl"].result_list] == keys
        page = self.client.get(f"/admin/pgstreams/stream/{Stream.objects.get(key='chat/1').pk}/change/")
        self.assertContains(page, "ada@example.org")
