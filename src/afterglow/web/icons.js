// Paths of the icons, drawn as strokes in a square of 24.

export const CHAT = "M4 5h16v11H9l-5 4z";
export const TREE = "M3 4h7v16H3zM13 4h8v4h-8zM13 11h5v4h-5zM13 18h8v2h-8z";
export const PLUS = "M12 5v14M5 12h14";
export const MENU = "M4 7h16M4 12h16M4 17h16";
export const SEND = "M12 19V5M6 11l6-6 6 6";
export const STOP = "M7 7h10v10H7z";
export const COPY = "M9 9h11v11H9zM15 9V4H4v11h5";
export const EDIT = "M4 20h4L19 9l-4-4L4 16zM13 7l4 4";
export const RETRY = "M20 12a8 8 0 1 1-2.3-5.6M20 4v5h-5";
export const TRASH = "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13";
export const DOWNLOAD = "M12 4v11M7 10l5 5 5-5M5 20h14";
export const UPLOAD = "M12 15V4M7 9l5-5 5 5M5 20h14";
export const CLIP = "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 5 5l-8.5 8.5a1.8 1.8 0 0 1-2.5-2.5L14.5 8";
export const TUNE = "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4";
export const CLOSE = "M6 6l12 12M18 6L6 18";
export const LEFT = "M14 6l-6 6 6 6";
export const RIGHT = "M10 6l6 6-6 6";
export const SUN = "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5";
export const PIN = "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v6";
export const FORK = "M7 4v10a4 4 0 0 0 4 4h6M7 8a4 4 0 0 0 4 4h0M14 15l3 3-3 3";
export const PLAY = "M8 5l11 7-11 7z";
export const POWER = "M12 4v8M7.5 6.5a7 7 0 1 0 9 0";
export const KEY = "M14 10a4 4 0 1 0-3.5 4L13 16.5h2.5V19H18v-3.5zM9.5 9.5h0";
export const FILE = "M6 3h8l4 4v14H6zM14 3v4h4";
