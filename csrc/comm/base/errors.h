#pragma once

#include <stdexcept>

namespace fold3d::comm {

/// Anything that went wrong between ranks. The text names the rank, the action, the peer and the cause.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A wait reached its deadline (setting comm_timeout).
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// A message is not the one the schedule asks for, or not a message of ours.
class ProtocolError : public CommError {
 public:
  using CommError::CommError;
};

/// The communication was ended on purpose; the text is the reason given to abort().
class AbortedError : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace fold3d::comm
