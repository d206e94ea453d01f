"""What an S3-compatible endpoint's answers mean: which pass by themselves, and what to say of the others."""

from __future__ import annotations

from botocore import exceptions
from botocore.exceptions import BotoCoreError, ClientError

MISSING = {"NoSuchKey", "NotFound", "404"}
"""Codes of an object that is not there. A HEAD request has no more than a number for it."""

REFUSED = {"PreconditionFailed", "412"}
"""Codes of a condition that does not hold."""

NO_RANGE = {"InvalidRange", "416"}
"""Codes of bytes beyond the end of an object."""

UNKNOWN = {"NotImplemented", "501", "InvalidArgument"}
"""Codes of a condition that the endpoint does not know."""

_PASSING = {
    "BadDigest",  # the bytes were damaged on their way
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_NO_ANSWER = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.ChecksumError,
)
_OTHER_REGION = {
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_NO_CREDENTIALS = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
_CREDENTIALS = {
    "InvalidAccessKeyId": "the endpoint does not know the access key; check AWS_ACCESS_KEY_ID or AWS_PROFILE, and "
    "AWS_ENDPOINT_URL_S3 where the storage is not Amazon's",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the credentials have expired; get new ones and start again",
    "TokenRefreshRequired": "the credentials have expired; get new ones and start again",
    "InvalidToken": "the session token is not valid; check AWS_SESSION_TOKEN, or unset it for keys that have none",
    "RequestTimeTooSkewed": "this machine's clock is too far from the endpoint's; set it",
}


def code(error: ClientError) -> str:
    """The code of an error that the endpoint answered with."""
    return str(error.response.get("Error", {}).get("Code", ""))


def passes(error: BotoCoreError | ClientError) -> bool:
    """Whether the same request may well succeed a little later."""
    if isinstance(error, ClientError):
        return code(error) in _PASSING or _status(error) == 429 or (_status(error) >= 500 and _status(error) != 501)
    return isinstance(error, _NO_ANSWER) and not isinstance(error, exceptions.SSLError)


def reason(error: BotoCoreError | ClientError, *, bucket: str, endpoint: str, seconds: float) -> str:
    """Why a request failed and what would be right, without the end of a sentence.

    Args:
        error: what boto3 raised.
        bucket: that was asked for.
        endpoint: that was asked.
        seconds: for how long a request that may pass was tried.
    """
    if isinstance(error, ClientError):
        name = code(error)
        if name in _CREDENTIALS:
            return _CREDENTIALS[name]
        if name == "NoSuchBucket":
            return f"{endpoint} has no bucket {bucket}; make it, or correct the URL"
        if name in ("AccessDenied", "AllAccessDisabled", "Forbidden", "403"):
            return (
                f"access is denied; the credentials need s3:ListBucket on bucket {bucket}, and s3:GetObject, "
                "s3:PutObject and s3:DeleteObject on what lies in it"
            )
        if name in _OTHER_REGION:
            region = _region(error)
            if region is None:
                return f"bucket {bucket} lies in another region; set AWS_DEFAULT_REGION to that"
            return f"bucket {bucket} lies in region {region}; set AWS_DEFAULT_REGION={region}"
        said = f"{name} {_line(error.response.get('Error', {}).get('Message', ''))}".strip()
        return f"{endpoint} answered {said}" + (f" for {seconds:g} s" if passes(error) else "")
    if isinstance(error, _NO_CREDENTIALS):
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, exceptions.SSLError):
        return (
            f"the certificate of {endpoint} is not accepted ({_line(error)}); AWS_CA_BUNDLE can name another authority"
        )
    if passes(error):
        return (
            f"no whole answer came from {endpoint} for {seconds:g} s ({type(error).__name__}); check the network and "
            "AWS_ENDPOINT_URL_S3"
        )
    return _line(error)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _region(error: ClientError) -> str | None:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = error.response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    return None if region is None else str(region)


def _line(text: object) -> str:
    return " ".join(str(text).split()).rstrip(".")
